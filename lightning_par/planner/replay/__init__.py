"""The recorded functions, run again by the rules of sharded tensors on fakes, as one rank of a layout runs them."""
