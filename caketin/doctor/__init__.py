"""What `caketin doctor` looks at; each check says what it found and, where it is not well, what to do."""
