"""Equity in online resource allocation: fair shares for people who arrive one by one.

*External* equity: agents differ in how much they ask for, and nobody should get a smaller
fraction because of when he came. *Internal* equity: everybody asks for one unit, and each
(overlapping) group should get its share. Both are measured *ex ante* (the worst expectation) and
*ex post* (the expectation of the worst).

After Sankararaman, Srinivasan and Xu, "Promoting External and Internal Equities Under
Ex-Ante/Ex-Post Metrics in Online Resource Allocation", ICML 2024. The policies here carry the
guarantees of the paper's abstract, with proofs of our own.

Examples
--------
A stock of 6 doses, three clinics that will ask one after another:

>>> import icml24.online_equity as eq
>>> demand = eq.DemandModel([[2, 6], [3], [1, 8]], names=["north", "east", "south"])
>>> instance = eq.ExternalInstance(demand, budget=6)
>>> policy = eq.SimulationAttenuation().fit(instance)
>>> round(policy.guarantee_, 3)
0.868
>>> round(policy.decide(6), 2)
1.84
"""

from icml24.online_equity.demand import DemandModel
from icml24.online_equity.external import ExternalInstance, LPSolution, clairvoyant_ante, fills
from icml24.online_equity.group_policies import (
    ExPostOptimal,
    GroupPolicy,
    LPAttenuated,
    LPMagician,
    OccupancyOptimal,
    Quota,
    SelectionSampling,
    exact_units,
)
from icml24.online_equity.groups import ArrivalModel, GroupLPSolution, InternalInstance
from icml24.online_equity.hard_instances import (
    adversarial_instance,
    ex_post_chain,
    random_instance,
    synchronous_demands,
    tight_instance,
    tight_rounds,
)
from icml24.online_equity.peers import (
    EqualSplit,
    FirstComeFirstServed,
    LPGreedy,
    ProjectedProportional,
    ServeAll,
    ShareOfRest,
    TargetFillRate,
    TypeQuotas,
)
from icml24.online_equity.policies import (
    NotFittedError,
    OnlineOptimal,
    Policy,
    RatioAttenuation,
    SimulationAttenuation,
)
from icml24.online_equity.report import EquityReport, compare, evaluate

__all__ = [
    "ArrivalModel",
    "DemandModel",
    "EqualSplit",
    "EquityReport",
    "ExPostOptimal",
    "ExternalInstance",
    "FirstComeFirstServed",
    "GroupLPSolution",
    "GroupPolicy",
    "InternalInstance",
    "LPAttenuated",
    "LPGreedy",
    "LPMagician",
    "LPSolution",
    "NotFittedError",
    "OccupancyOptimal",
    "OnlineOptimal",
    "Policy",
    "ProjectedProportional",
    "Quota",
    "RatioAttenuation",
    "SelectionSampling",
    "ServeAll",
    "ShareOfRest",
    "SimulationAttenuation",
    "TargetFillRate",
    "TypeQuotas",
    "adversarial_instance",
    "clairvoyant_ante",
    "compare",
    "evaluate",
    "ex_post_chain",
    "exact_units",
    "fills",
    "random_instance",
    "synchronous_demands",
    "tight_instance",
    "tight_rounds",
]
