"""The draft that is fastest on this machine: measured steps, acceptance rates, and the choice that follows from both."""
