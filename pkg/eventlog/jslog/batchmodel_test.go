package jslog_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// fault is a failure of one single publish or one batch.
type fault string

const (
	none          fault = "none"
	loseRequest   fault = "request is lost"
	loseAck       fault = "acknowledgement is lost"
	late          fault = "arrives late"
	twice         fault = "delivered twice"
	breakBefore   fault = "connection breaks before it is stored"
	breakAfter    fault = "connection breaks after it is stored"
	refuse        fault = "refused"
	disabled      fault = "batches are not allowed"
	partly        fault = "a part is stored, no answer"
	partlyRefused fault = "a part is stored, then an error"
	restored      fault = "a part is stored, the rest after a restart"
	overtaken     fault = "another writer is faster"
	cancel        fault = "contexts end"
	cancelRefuse  fault = "contexts end, and it is refused"
	noBatches     fault = "the server ignores the batch headers"
	full          fault = "the disk is full for a while"
)

var faults = []fault{none, none, loseRequest, loseAck, late, twice, breakBefore, breakAfter, refuse, disabled, partly, partlyRefused, restored, overtaken, cancel, cancelRefuse, noBatches, full}

// modelMessage is a message that the model stores. Its stream sequence is its index + 1.
type modelMessage struct {
	subject string
	header  nats.Header
	data    []byte
}

// streamModel answers for a stream of the log, like the server, with faults. A connection of the log is named by client.
type streamModel struct {
	conn, client *nats.Conn

	mu       sync.Mutex
	plan     []fault
	stored   []modelMessage
	ids      map[string]uint64
	batches  map[string][]*nats.Msg
	open     map[string]bool // batches without a gap
	delayed  [][]*nats.Msg
	contexts []context.CancelFunc
	fullFor  int // publishes that are still refused because the disk is full
	biggest  int // messages of the largest batch that was stored completely
	problems []string
}

func newStreamModel(t *testing.T, plan []fault) (m *streamModel, stop func()) {
	t.Helper()
	ns, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	connect := func() *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(ns), nats.MaxReconnects(-1), nats.ReconnectWait(time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		return nc
	}
	m = &streamModel{conn: connect(), client: connect(), plan: plan, ids: map[string]uint64{}, batches: map[string][]*nats.Msg{}, open: map[string]bool{}}
	for subject, handle := range map[string]nats.MsgHandler{"ev.>": m.publish, "$JS.API.STREAM.MSG.GET.EVENTS-0": m.get} {
		if _, err := m.conn.Subscribe(subject, handle); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.conn.Flush(); err != nil {
		t.Fatal(err)
	}
	return m, func() {
		m.client.Close()
		m.conn.Close()
		ns.Shutdown()
		ns.WaitForShutdown()
	}
}

func (m *streamModel) fail(format string, args ...any) {
	m.problems = append(m.problems, fmt.Sprintf(format, args...))
}

// context returns a context that the fault cancel ends.
func (m *streamModel) context(ctx context.Context) context.Context {
	ctx, stop := context.WithCancel(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.contexts = append(m.contexts, stop)
	return ctx
}

// publish handles a message as it arrives. A batch is handled when its last message arrives.
func (m *streamModel) publish(msg *nats.Msg) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id := msg.Header.Get("Nats-Batch-Id")
	if id == "" {
		m.handle([]*nats.Msg{msg}, false)
		return
	}
	n, err := strconv.Atoi(msg.Header.Get("Nats-Batch-Sequence"))
	if err != nil {
		m.fail("batch sequence: %v", err)
	}
	if n == 1 {
		m.open[id] = true
	}
	if m.open[id] && n != len(m.batches[id])+1 {
		m.open[id] = false
	}
	m.batches[id] = append(m.batches[id], msg)
	if msg.Header.Get("Nats-Batch-Commit") != "1" {
		return
	}
	list := m.batches[id]
	delete(m.batches, id)
	if !m.open[id] {
		m.answerError(msg, 10176)
		return
	}
	m.handle(list, true)
}

// handle stores a single publish or a batch, with the next fault of the plan.
func (m *streamModel) handle(list []*nats.Msg, batch bool) {
	f := none
	if len(m.plan) > 0 {
		f, m.plan = m.plan[0], m.plan[1:]
	}
	last := list[len(list)-1]
	if m.fullFor > 0 {
		f = full
	}
	switch f {
	case full:
		if m.fullFor--; m.fullFor < 0 {
			m.fullFor = 5
		}
		m.answerError(last, 10023)
	case loseRequest:
	case loseAck:
		m.store(list, batch, false)
	case late:
		m.delayed = append(m.delayed, list)
		return
	case twice:
		m.store(list, batch, true)
		m.store(list, batch, false)
	case breakBefore:
		m.disconnect()
	case breakAfter:
		m.store(list, batch, false)
		m.disconnect()
	case refuse:
		m.answerError(last, map[bool]jetstream.ErrorCode{true: 10210, false: 10008}[batch])
	case disabled:
		m.answerError(last, map[bool]jetstream.ErrorCode{true: 10174, false: 10009}[batch])
	case partly, partlyRefused, restored:
		m.storePart(list, batch, f)
	case overtaken:
		m.overtake(list[len(list)/2])
		m.store(list, batch, true)
	case cancel, cancelRefuse:
		for _, stop := range m.contexts {
			stop()
		}
		m.contexts = nil
		if f == cancel {
			m.store(list, batch, true)
		} else {
			m.answerError(last, map[bool]jetstream.ErrorCode{true: 10210, false: 10008}[batch])
		}
	case noBatches:
		for i, one := range list {
			m.store([]*nats.Msg{one}, false, i == len(list)-1)
		}
	default:
		m.store(list, batch, true)
	}
	if f != none {
		return
	}
	for _, l := range m.delayed {
		m.store(l, len(l) > 1, false)
	}
	m.delayed = nil
}

func (m *streamModel) disconnect() {
	if err := m.client.ForceReconnect(); err != nil {
		m.fail("disconnect: %v", err)
	}
}

// storePart stores the first half of a batch that passes the checks. Then the write fails.
func (m *streamModel) storePart(list []*nats.Msg, batch bool, f fault) {
	if !batch {
		m.store(list, false, true)
		return
	}
	if code := m.check(list, true); code != 0 {
		m.answerError(list[len(list)-1], code)
		return
	}
	for i, msg := range list {
		if f == restored || i < len(list)/2 {
			m.add(msg)
		}
	}
	switch f {
	case restored:
		m.disconnect()
	case partlyRefused:
		m.answerError(list[len(list)-1], 10077)
		m.fullFor = 5
	default:
	}
}

// overtake stores a commit of another writer before the one in msg.
func (m *streamModel) overtake(msg *nats.Msg) {
	s, err := events.ParseSubject(msg.Subject)
	if err != nil {
		m.fail("%v", err)
		return
	}
	c, err := events.DecodeCommit(msg.Data)
	if err != nil {
		m.fail("%v", err)
		return
	}
	if c.ID = events.DeriveID(events.KindCommit, "faster", c.ID); m.ids[c.ID] > 0 || m.check([]*nats.Msg{msg}, false) != 0 {
		return
	}
	c = c.WithStoredEvents(s, c.Events)
	data, err := c.Encode()
	if err != nil {
		m.fail("%v", err)
		return
	}
	m.add(&nats.Msg{Subject: msg.Subject, Data: data, Header: nats.Header{jetstream.MsgIDHeader: {c.ID}, topology.HeaderSignature: {modelKeys.Sign(s, c)}}})
}

// check returns the error code with which the server refuses a single publish or a batch, or 0.
func (m *streamModel) check(list []*nats.Msg, batch bool) jetstream.ErrorCode {
	subjects := map[string]bool{}
	for _, msg := range list {
		if batch && m.ids[msg.Header.Get(jetstream.MsgIDHeader)] > 0 {
			return 10201
		}
		if subjects[msg.Subject] {
			m.fail("two commits of %s are in one batch", msg.Subject)
			return 10164
		}
		subjects[msg.Subject] = true
		if guard := msg.Header.Get(jetstream.ExpectedLastSubjSeqHeader); guard != strconv.FormatUint(m.last(msg.Subject), 10) {
			return jetstream.JSErrCodeStreamWrongLastSequence
		}
	}
	return 0
}

// last returns the stream sequence of the last message of a subject, or 0.
func (m *streamModel) last(subject string) uint64 {
	for i := len(m.stored); i > 0; i-- {
		if m.stored[i-1].subject == subject {
			return uint64(i)
		}
	}
	return 0
}

func (m *streamModel) add(msg *nats.Msg) {
	m.stored = append(m.stored, modelMessage{msg.Subject, msg.Header, msg.Data})
	m.ids[msg.Header.Get(jetstream.MsgIDHeader)] = uint64(len(m.stored))
}

func (m *streamModel) store(list []*nats.Msg, batch, answer bool) {
	last := list[len(list)-1]
	code := m.check(list, batch)
	id := last.Header.Get(jetstream.MsgIDHeader)
	ack := map[string]any{"stream": "EVENTS-0"}
	switch {
	case code != 0 && answer:
		m.answerError(last, code)
		return
	case code != 0:
		return
	case !batch && m.ids[id] > 0:
		ack["seq"], ack["duplicate"] = m.ids[id], true
	default:
		for _, msg := range list {
			m.add(msg)
		}
		ack["seq"] = len(m.stored)
		if batch {
			ack["batch"], ack["count"] = last.Header.Get("Nats-Batch-Id"), len(list)
			m.biggest = max(m.biggest, len(list))
		}
	}
	if answer {
		m.answer(last, ack)
	}
}

func (m *streamModel) answerError(msg *nats.Msg, code jetstream.ErrorCode) {
	m.answer(msg, map[string]any{"stream": "EVENTS-0", "error": jetstream.APIError{Code: 400, ErrorCode: code, Description: "model"}})
}

func (m *streamModel) answer(msg *nats.Msg, v any) {
	data, err := json.Marshal(v)
	if err == nil && msg.Reply != "" {
		err = msg.Respond(data)
	}
	if err != nil {
		m.fail("answer: %v", err)
	}
}

// get answers STREAM.MSG.GET.
func (m *streamModel) get(msg *nats.Msg) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var req struct {
		Seq     uint64 `json:"seq"`
		LastFor string `json:"last_by_subj"`
		NextFor string `json:"next_by_subj"`
	}
	if err := json.Unmarshal(msg.Data, &req); err != nil {
		m.fail("request: %v", err)
	}
	seq := m.last(req.LastFor)
	for i := req.Seq; req.NextFor != "" && i <= uint64(len(m.stored)); i++ {
		if i > 0 && m.stored[i-1].subject == req.NextFor {
			seq = i
			break
		}
	}
	if seq == 0 {
		m.answer(msg, map[string]any{"error": jetstream.APIError{Code: 404, ErrorCode: jetstream.JSErrCodeMessageNotFound}})
		return
	}
	found := m.stored[seq-1]
	var raw strings.Builder
	raw.WriteString("NATS/1.0\r\n")
	for name, values := range found.header {
		fmt.Fprintf(&raw, "%s: %s\r\n", name, values[0])
	}
	raw.WriteString("\r\n")
	m.answer(msg, map[string]any{"message": map[string]any{
		"subject": found.subject, "seq": seq, "data": found.data, "time": time.Unix(1_750_000_000, 0), "hdrs": base64.StdEncoding.EncodeToString([]byte(raw.String())),
	}})
}

// modelKeys are the keys of the commits of the model.
var modelKeys = func() eventlog.Keys {
	k, err := eventlog.ParseKeys(topology.UserExecutor+":"+secret("executor"), topology.UserExecutor)
	if err != nil {
		panic(err)
	}
	return k
}()
