"""`shoal dev`: an editor's server as a job, a link to it, and its files on this machine."""
