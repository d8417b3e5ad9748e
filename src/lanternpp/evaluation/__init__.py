"""What a method gains and what it costs: speed side by side, and the quality of its pictures."""
