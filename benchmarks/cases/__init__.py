"""Tables of cases: rows that say what is measured, and how each is prepared."""
