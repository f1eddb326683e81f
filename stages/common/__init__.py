"""What the stages share: the contract, checks of input, the machine, Triton's names. No stage."""
