"""fedsim: a federated-learning testbed with an adversarial server."""
