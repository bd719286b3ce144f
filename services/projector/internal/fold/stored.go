package fold

import "github.com/spoolhq/spool/pkg/events"

// objectBytesChange returns by how many bytes an event changes the size of the session's objects in the bucket
// workspaces. For snapshot events of earlier versions, which do not state it, it returns the bytes of new files, a
// close estimate.
func objectBytesChange(e events.Event) int64 {
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

// subtractStoredBytes subtracts the bytes that a deleted session stored from the stored bytes of its tenant.
func (f *batchFold) subtractStoredBytes(a *sessionRows) error {
	shares, err := decodeDayUsage(a.tombstone.row.Spent)
	if err != nil || shares[storedBytesDay].Stored == 0 {
		return err
	}
	f.changedUsageRow(a.key.Tenant, storedBytesDay).Stored -= shares[storedBytesDay].Stored
	delete(shares, storedBytesDay)
	markChanged(&f.deleted, a.tombstone).Spent, err = marshalUnescaped(shares)
	return err
}
