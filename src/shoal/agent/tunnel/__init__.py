"""The node's end of a gang's encrypted network. Imported by nobody who does not use one."""
