"""What a run leaves behind: the journal (the truth), metrics, mirrors of them, and abort rules."""
