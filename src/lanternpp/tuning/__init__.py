"""The search for the draft that draws fastest with a method on this machine: a study of Optuna."""
