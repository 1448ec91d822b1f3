"""The planner: what a layout will cost in time and memory, before anything runs. numpy only, no torch."""
