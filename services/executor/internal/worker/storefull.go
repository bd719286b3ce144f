package worker

import "github.com/spoolhq/spool/pkg/events"

// codeStorageFull is the code of the error event about output that waits for room.
const codeStorageFull = "STORAGE_FULL"

// waitsForRoom reports whether the pending events have to wait for room in the store of NATS. Once enough are pending the agent waits too. The end of
// a turn does not wait, nor the output of a turn that is being stopped.
func (f *follower) waitsForRoom() bool {
	if f.ended != nil || f.stop.IsStopping() || !f.w.deps.Room.Low() {
		return false
	}
	if !f.fullRecorded {
		f.fullRecorded = true
		f.commits.AddFirst(f.NewEvents(events.Error{
			Code: codeStorageFull, Message: "the store of NATS is full but for its reserve: what the agent says from here on is stored when there is room again",
		})...)
		return false
	}
	return true
}
