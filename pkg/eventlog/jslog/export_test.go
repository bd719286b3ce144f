package jslog

// ForceBatches has commits of all aspects share batches of at least one commit, also while nothing is in flight.
func ForceBatches(l *Log) {
	l.batchAll = true
	SetMinBatch(l, 1)
	for _, b := range l.batchers {
		b.forced = true
	}
}

// SetMinBatch sets the number of waiting commits from which they share a batch.
func SetMinBatch(l *Log, n int) {
	for _, b := range l.batchers {
		b.minBatch = n
	}
}

// IsIdle reports whether no commit waits or is in flight.
func IsIdle(l *Log) bool {
	for _, b := range l.batchers {
		b.mu.Lock()
		idle := b.single == 0 && !b.batch && len(b.waiting) == 0
		b.mu.Unlock()
		if !idle {
			return false
		}
	}
	return true
}

// Waiting returns the number of commits that wait for a batch.
func Waiting(l *Log) (n int) {
	for _, b := range l.batchers {
		b.mu.Lock()
		n += len(b.waiting)
		b.mu.Unlock()
	}
	return n
}
