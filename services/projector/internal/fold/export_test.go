package fold

// SaveStatesEvery makes the model save the state of a session after every n of its events.
func (m *Model) SaveStatesEvery(n int64) { m.stateInterval = n }
