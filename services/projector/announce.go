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

// maxLive is the largest announcement (message on LIVE) in bytes. NATS accepts 1 MB.
const maxLive = 900_000

// announcer publishes the committed changes of a projector group to gateways. It must be used by one goroutine.
type announcer struct {
	nc          *nats.Conn
	group       int
	lostMessage bool // whether a message could not be sent
}

// started publishes that this process projects the group now. Gateways then compare the group's sessions with the read
// models, because announcements may have been lost.
func (a *announcer) started() error {
	data, err := json.Marshal(readmodel.ProjectorStarted{Group: a.group})
	if err != nil {
		return err
	}
	return a.nc.Publish(topology.CtlProjector, data)
}

// send announces the changes of a batch, one session after the other. After a failure, the next call first publishes
// the message of started, because announcements were lost.
func (a *announcer) send(list []fold.Live) error {
	if a.lostMessage {
		if err := a.started(); err != nil {
			return err
		}
		a.lostMessage = false
	}
	for _, l := range list {
		var err error
		for _, m := range liveMessages(l, maxLive) {
			err = errors.Join(err, a.nc.Publish(events.LiveSubject(l.Session.Tenant, l.Session.ID), m))
		}
		if err != nil {
			a.lostMessage = true
			return err
		}
	}
	return nil
}

// liveMessages encodes one session's events as readmodel.LiveMessage, in messages of at most limit bytes. Only the last
// message has the session's tip; the others have the seq of their last event, so that gateways do not treat the
// remaining events as missing. For an event that is too large only its seq is announced.
func liveMessages(l fold.Live, limit int) [][]byte {
	w := liveWriter{session: l.Session.ID, limit: limit - 200}
	if len(l.Events) == 0 {
		w.tip = l.Tip
	}
	for _, e := range l.Events {
		if len(e.JSON) > w.limit {
			w.flush()
			w.tip = e.Seq
			w.flush()
			continue
		}
		if w.size+len(e.JSON) > w.limit {
			w.flush()
		}
		w.events, w.size, w.tip = append(w.events, e.JSON), w.size+len(e.JSON)+1, e.Seq
	}
	w.tip = l.Tip
	w.flush()
	return w.out
}

// liveWriter encodes the changes of one session as messages on LIVE, none of which exceeds a size limit.
type liveWriter struct {
	session           string
	limit, size       int
	tip, announcedTip int64
	events            []string
	out               [][]byte
}

// flush ends the current message, unless it is empty and its tip was announced already.
func (w *liveWriter) flush() {
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
