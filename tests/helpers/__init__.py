"""What tests share: one module for each subject, whose docstring says what it has."""
