"""The processes of one host: started, watched, stopped, and what they print."""
