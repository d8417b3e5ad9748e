"""Gains and costs of methods: their speed side by side, and the quality of their pictures."""
