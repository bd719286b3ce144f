package janitor

// RememberedFiles returns the number of files that the janitor remembers as needed.
func (j *Janitor) RememberedFiles() int { return len(j.fileNeeded) }
