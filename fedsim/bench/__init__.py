"""The benchmark: attacks x defenses x strengths x seeds, what each costs and what it buys.

`cells` is what a bench spec asks for, `measurement` does it, `table` says what came out.
"""
