"""Experiments that answer a question about precision with training runs: they call the other rooms, none calls them."""
