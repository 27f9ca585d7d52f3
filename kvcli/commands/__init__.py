"""What commands share, without a terminal: options, folders, sizes, tables, what a suite is, facts of the machine."""
