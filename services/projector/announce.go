package projector

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// maxAnnouncementBytes is the size of the largest message that the projector publishes on LIVE, in bytes. NATS accepts
// 1 MB.
const maxAnnouncementBytes = 900_000

// announcer publishes the committed changes of a projector group to gateways. It must be used by one goroutine.
type announcer struct {
	nc          *nats.Conn
	group       int
	lostMessage bool // whether a message could not be sent
}

// announceTakeover publishes that this process projects the group from now on. Gateways then compare the group's
// sessions with the read models, because announcements may have been lost.
func (a *announcer) announceTakeover() error {
	data, err := json.Marshal(readmodel.ProjectorStarted{Group: a.group})
	if err != nil {
		return err
	}
	return a.nc.Publish(topology.ProjectorStartSubject, data)
}

// announceChanges publishes the announcements of a batch of commits to gateways, one session after the other. If a
// publication fails, the next call of announceChanges first calls announceTakeover, because announcements were lost.
func (a *announcer) announceChanges(list []fold.Announcement) error {
	if a.lostMessage {
		if err := a.announceTakeover(); err != nil {
			return err
		}
		a.lostMessage = false
	}
	changed := map[string]bool{}
	for _, l := range list {
		var err error
		if l.Changed && !changed[l.Session.Tenant] {
			changed[l.Session.Tenant] = true
			err = a.nc.Publish(events.LiveSubject(l.Session.Tenant, readmodel.ChangesToken), nil)
		}
		for _, m := range encodeAnnouncement(l, maxAnnouncementBytes) {
			err = errors.Join(err, a.nc.Publish(events.LiveSubject(l.Session.Tenant, l.Session.ID), m))
		}
		if err != nil {
			a.lostMessage = true
			return err
		}
	}
	return nil
}

// encodeAnnouncement encodes the new events of one session as readmodel.LiveMessage, in messages of at most limit bytes. Only
// the last message has the session's tip; the others have the seq of their last event, so that gateways do not treat
// the remaining events as missing. An event that is too large for a message is announced by its seq only.
func encodeAnnouncement(l fold.Announcement, limit int) [][]byte {
	w := announcementEncoder{session: l.Session.ID, limit: limit - 200}
	if len(l.Events) == 0 {
		w.tip = l.Tip
	}
	for _, e := range l.Events {
		if len(e.JSON) > w.limit {
			w.endMessage()
			w.tip = e.Seq
			w.endMessage()
			continue
		}
		if w.size+len(e.JSON) > w.limit {
			w.endMessage()
		}
		w.events, w.size, w.tip = append(w.events, e.JSON), w.size+len(e.JSON)+1, e.Seq
	}
	w.tip = l.Tip
	w.endMessage()
	return w.out
}

// announcementEncoder encodes the changes of one session as messages on LIVE, none of which exceeds a size limit.
type announcementEncoder struct {
	session           string
	limit, size       int
	tip, announcedTip int64
	events            []string
	out               [][]byte
}

// endMessage ends the current message, unless the message is empty and its tip was announced already.
func (w *announcementEncoder) endMessage() {
	if w.tip == w.announcedTip && len(w.events) == 0 {
		return
	}
	w.announcedTip = w.tip
	var b bytes.Buffer
	b.Grow(w.size + 200)
	b.WriteString(`{"sessionId":"` + w.session + `","tip":` + strconv.FormatInt(w.tip, 10) + `,"events":[`)
	b.WriteString(strings.Join(w.events, ","))
	b.WriteString(`]}`)
	w.out = append(w.out, b.Bytes())
	w.events, w.size = nil, 0
}
