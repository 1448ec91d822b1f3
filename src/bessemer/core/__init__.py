"""What all rooms share: jobs, models, layouts, machines, problems, errors, units. Never imports torch.

Import from the modules (`from bessemer.core.job import Job`): the package itself loads nothing.
"""
