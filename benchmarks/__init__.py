"""What genpool costs and what it gains, measured against others in one run on one machine. See README.md."""
