"""How the victims of the tables, and the small prior network, learned."""
