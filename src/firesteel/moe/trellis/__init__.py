"""EXL3 on a GPU: MoE layers and linears whose weights are trellises."""
