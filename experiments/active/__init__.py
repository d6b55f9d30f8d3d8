"""What an active server gains: each manoeuvre measured by itself."""
