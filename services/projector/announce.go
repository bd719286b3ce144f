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

const (
	// maxLive is the largest message on LIVE in bytes. NATS accepts 1 MB.
	maxLive = 900_000
	// maxText is the largest text delta in bytes. As JSON it may be six times as long.
	maxText = 64 << 10
	// deltaOverhead is about the size in bytes of a text delta's JSON without its text.
	deltaOverhead = 256
)

// announcer announces committed changes to gateways. It must be used by one goroutine.
type announcer struct {
	nc          *nats.Conn
	group       int
	lostMessage bool // whether a message could not be sent
}

// started asks gateways to compare the group's sessions with the read models, because announcements may have been
// lost.
func (a *announcer) started() error {
	data, err := json.Marshal(readmodel.Started{Group: a.group})
	if err != nil {
		return err
	}
	return a.nc.Publish(topology.CtlProjector, data)
}

// send announces the changes of a batch, one session after the other. After a failure, the next successful call also
// sends the request of started.
func (a *announcer) send(list []fold.Live) error {
	if a.lostMessage {
		if err := a.started(); err != nil {
			return err
		}
		a.lostMessage = false
	}
	for _, l := range list {
		messages, err := liveMessages(l, maxLive)
		for _, m := range messages {
			err = errors.Join(err, a.nc.Publish(events.LiveSubject(l.Session.Tenant, l.Session.ID), m))
		}
		if err != nil {
			a.lostMessage = true
			return err
		}
	}
	return nil
}

// liveMessages encodes one session's changes as readmodel.Live, in messages of at most limit bytes: events first,
// then text. Only the last message has the session's tip; the others have the seq of their last event, so that
// gateways do not treat the remaining events as missing. For an event that is too large only its seq is announced.
func liveMessages(l fold.Live, limit int) ([][]byte, error) {
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
	for _, d := range l.Deltas {
		for _, p := range pieces(d) {
			text, err := p.AppendJSON(make([]byte, 0, len(p.Text)+deltaOverhead))
			if err != nil {
				return nil, err
			}
			if w.size+len(text) > w.limit {
				w.flush()
			}
			w.deltas, w.size = append(w.deltas, string(text)), w.size+len(text)+1
		}
	}
	w.tip = l.Tip
	w.flush()
	return w.out, nil
}

// liveWriter collects events and text of one session into messages of a limited size.
type liveWriter struct {
	session           string
	limit, size       int
	tip, announcedTip int64
	events, deltas    []string
	out               [][]byte
}

// flush ends the current message, unless it is empty and its tip was announced already.
func (w *liveWriter) flush() {
	if w.tip == w.announcedTip && len(w.events)+len(w.deltas) == 0 {
		return
	}
	w.announcedTip = w.tip
	var b bytes.Buffer
	b.Grow(w.size + 200)
	b.WriteString(`{"sessionId":"` + w.session + `","tip":` + strconv.FormatInt(w.tip, 10) + `,"events":[`)
	b.WriteString(strings.Join(w.events, ","))
	b.WriteString(`],"deltas":[`)
	b.WriteString(strings.Join(w.deltas, ","))
	b.WriteString(`]}`)
	w.out = append(w.out, b.Bytes())
	w.events, w.deltas, w.size = nil, nil, 0
}

// pieces splits a long text at character boundaries.
func pieces(d events.Delta) []events.Delta {
	var out []events.Delta
	for len(d.Text) > maxText {
		cut := maxText
		for cut > maxText-4 && d.Text[cut]&0xC0 == 0x80 {
			cut--
		}
		p := d
		p.Text = d.Text[:cut]
		out = append(out, p)
		d.Text, d.Offset = d.Text[cut:], d.Offset+uint32(cut)
	}
	return append(out, d)
}
