package fold

import "github.com/spoolhq/spool/pkg/events"

// objectBytes returns by how many bytes an event changes the size of the session's objects in the bucket workspaces.
// Snapshot events of earlier versions do not state it; the bytes of new files are a close estimate.
func objectBytes(e events.Event) int64 {
	switch d := e.Data.(type) {
	case events.FilePut:
		return clampInt64(d.Size)
	case events.SessionCreated:
		if d.Transcript != nil {
			return clampInt64(d.Transcript.Size)
		}
	case events.WorkspaceSynced:
		if d.Stored == 0 {
			return clampInt64(d.NewBytes)
		}
		return clampInt64(d.Stored)
	case events.WorkspaceTrimmed:
		return -clampInt64(d.Bytes)
	}
	return 0
}

// subtractStored subtracts the session's stored bytes from those of its tenant.
func (f *folding) subtractStored(a *aggregate) error {
	shares, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil || shares[noDay].Stored == 0 {
		return err
	}
	f.usageRow(a.key.Tenant, noDay).Stored -= shares[noDay].Stored
	delete(shares, noDay)
	markChanged(&f.deleted, a.tombstone).Spent, err = marshal(shares)
	return err
}
