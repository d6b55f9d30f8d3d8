"""The papers' tables again, unattended: the list of them, what makes one, and the runner."""
