"""What looks at a run while it lasts, where a setting asks for it: profiles, anomalies, values of the system, the journal."""
