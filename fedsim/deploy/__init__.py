"""A real deployment: SuperLink and SuperNodes of Flower, their certificates and keys, and the apps
that they run."""
