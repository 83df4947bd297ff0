"""What the columns share at run time: statistics, experiments over seeds, and access to data."""
