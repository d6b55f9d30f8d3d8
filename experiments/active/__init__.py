"""Active servers: what guards notice of them, and what honest rounds look like beside it."""
