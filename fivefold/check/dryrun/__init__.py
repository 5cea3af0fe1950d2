"""The rehearsal: the real training code on tensors that hold nothing, in a world that is not there."""
