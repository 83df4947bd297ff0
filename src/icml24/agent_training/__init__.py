"""Agent training: functions as learnable weights (AgentOptimizer).

Zhang et al., *Offline Training of Language Model Agents with Functions as Learnable Weights*, ICML
2024. The Python functions that an agent may call are trained like weights: a proposer (a language
model, or a program search) adds, revises and removes functions, a training set judges, and a step
that does not help is rolled back.

Your tools, your tasks, your endpoint:

.. code-block:: python

    from icml24.agent_training import *

    chat = OpenAIChat("my-model", base_url="http://localhost:8000/v1")
    trainer = AgentTrainer(
        ToolCallingAgent(chat, SandboxExecutor(isolation="required")),
        AgentOptimizer(FunctionSet([Function.from_callable(my_tool)]), LLMProposer(chat)),
        max_tokens=1_000_000, checkpoint="training.json", random_state=0,
    )
    trainer.fit([("What is ...?", "42"), ...])
    print(trainer.score(held_out_tasks), trainer.usage_)
    trainer.functions_.save_module("tools.py")
"""

from icml24.agent_training.actions import AddFunction, RemoveFunction, ReviseFunction, Terminate
from icml24.agent_training.agent import (
    Agent,
    Call,
    ReActAgent,
    RetrievalAgent,
    SchemaAgent,
    ToolCallingAgent,
    Trajectory,
)
from icml24.agent_training.chat import (
    CassetteChat,
    CassetteMissError,
    ChatError,
    ChatModel,
    ChatResult,
    LlamaCppChat,
    OpenAIChat,
    ScriptedChat,
    ToolCall,
    TransformersChat,
    Usage,
)
from icml24.agent_training.data import (
    DOMAINS,
    load_gaia,
    load_math,
    load_reasoning_gym,
    load_tabmwp,
    make_table_qa,
)
from icml24.agent_training.execution import (
    DockerExecutor,
    ExecutionResult,
    Executor,
    InProcessExecutor,
    PolicyError,
    SandboxExecutor,
    SandboxUnavailableError,
)
from icml24.agent_training.functions import Function, FunctionSet, InvalidFunctionError
from icml24.agent_training.optimizer import AgentOptimizer, LLMProposer, Proposer, StepResult
from icml24.agent_training.synthesis import Operator, Program, SynthesisProposer, synthesize
from icml24.agent_training.tasks import Task, TaskSet, close_match, exact_match
from icml24.agent_training.trainer import (
    AgentTrainer,
    EpochRecord,
    Evaluation,
    NotFittedError,
    evaluate,
)

__all__ = [
    "DOMAINS",
    "AddFunction",
    "Agent",
    "AgentOptimizer",
    "AgentTrainer",
    "Call",
    "CassetteChat",
    "CassetteMissError",
    "ChatError",
    "ChatModel",
    "ChatResult",
    "DockerExecutor",
    "EpochRecord",
    "Evaluation",
    "ExecutionResult",
    "Executor",
    "Function",
    "FunctionSet",
    "InProcessExecutor",
    "InvalidFunctionError",
    "LLMProposer",
    "LlamaCppChat",
    "NotFittedError",
    "OpenAIChat",
    "Operator",
    "PolicyError",
    "Program",
    "Proposer",
    "ReActAgent",
    "RemoveFunction",
    "RetrievalAgent",
    "ReviseFunction",
    "SandboxExecutor",
    "SandboxUnavailableError",
    "SchemaAgent",
    "ScriptedChat",
    "StepResult",
    "SynthesisProposer",
    "Task",
    "TaskSet",
    "Terminate",
    "ToolCall",
    "ToolCallingAgent",
    "Trajectory",
    "TransformersChat",
    "Usage",
    "close_match",
    "evaluate",
    "exact_match",
    "load_gaia",
    "load_math",
    "load_reasoning_gym",
    "load_tabmwp",
    "make_table_qa",
    "synthesize",
]
