"""Names in the folders of accelerate's `save_state` that several of our files need."""

RECORD = "paceline_author"  # our own key in the files of random streams; accelerate ignores it
STREAMS_OF_RANK_0 = "random_states_0.pkl"
