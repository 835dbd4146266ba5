"""Steps that are captured as CUDA graphs."""
