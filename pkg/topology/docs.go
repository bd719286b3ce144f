package topology

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// WriteDocs writes docs/subjects.md.
func WriteDocs(w io.Writer) error {
	var b strings.Builder
	b.WriteString("<!-- Generated from pkg/topology by `make generate`; do not edit. -->\n# Subjects\n\n" +
		"Everything of Spool that lies in NATS. `spool up` installs it; in a cluster the `admin` user does, once, with the number of shards that stays.\n")
	docStreams(&b)
	docBuckets(&b)
	docDurables(&b)
	docCore(&b)
	docUsers(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func docStreams(b *strings.Builder) {
	b.WriteString("\n## Streams\n\nWith one shard; with n shards partition p lies in EVENTS-(p mod n).\n\n" +
		"| stream | subjects | kind | writes | reads | what |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, s := range Streams(1) {
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n",
			s.Config.Name, code(subjectsBrief(s.Config.Subjects)), s.Kind, s.Writes, s.Reads, s.Config.Description)
	}
	b.WriteString("\n| setting | " + "retention | discard | storage | age | messages | bytes | per subject | persist mode |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, s := range Streams(1) {
		c := s.Config
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", c.Name, c.Retention, c.Discard, c.Storage,
			age(c.MaxAge), limit(c.MaxMsgs), limit(c.MaxBytes), limit(c.MaxMsgsPerSubject), c.PersistMode)
	}
	b.WriteString("\nThe subjects, token by token:\n\n")
	for _, l := range subjectLines() {
		fmt.Fprintf(b, "- %s: %s\n", code(l[0]), l[1])
	}
}

// subjectLines say what each subject is for.
func subjectLines() [][2]string {
	return [][2]string{
		{"ev.<partition>.<tenant>.<session>.life", "what was asked of a session; written by the session service"},
		{"ev.<partition>.<tenant>.<session>.run", "what its runs did; written by the holder of the epoch"},
		{"ev.<partition>.<tenant>.<catalogue id>.key", "an API key"},
		{"ev.<partition>.<tenant>.<catalogue id>.agent", "an agent's versions; .instance and .environment likewise, by the session service"},
		{"ev.<partition>.<tenant>.<catalogue id>.skill", "a skill's versions; written by the skills service"},
		{"dl.<partition>.<tenant>.<session>", "text in flight"},
		{CommandPattern, "a command; the id is what it is about"},
		{JobAny("<provider>"), "a job that any executor of the provider may take"},
		{JobOn("<provider>", "<engine>"), "a job for the executors of one engine"},
		{TimerAt("<session>"), "the session's schedule"},
		{TimerDue("<session>"), "the session's schedule fired"},
		{"live.<tenant>.<session>", "what changed in the read models"},
		{Dead("<origin>"), "a message that was given up"},
	}
}

// CommandPattern is CommandSubject in words.
const CommandPattern = "cmd.<service>.<partition>.<tenant>.<id>"

func docBuckets(b *strings.Builder) {
	b.WriteString("\n## Buckets\n\n| bucket | kind | names | age | storage | writes | reads | what |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, k := range KeyValues() {
		fmt.Fprintf(b, "| %s | key-value | %s | %s | %s | %s | %s | %s |\n", k.Config.Bucket, code(k.Keys), age(k.Config.TTL), k.Config.Storage, k.Writes, k.Reads, k.Config.Description)
	}
	for _, o := range ObjectBuckets() {
		fmt.Fprintf(b, "| %s | objects | %s | %s | %s | %s | %s | %s |\n", o.Config.Bucket, code(o.Names), age(o.Config.TTL), o.Config.Storage, o.Writes, o.Reads, o.Config.Description)
	}
}

func docDurables(b *strings.Builder) {
	b.WriteString("\n## Durables\n\n| durable | stream | filter | silent for at most | deliveries | pending |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, d := range []Durable{CommandsConsumer(), ReactorConsumer(0), TimersConsumer(), JobsAnyConsumer("<provider>"), JobsOnConsumer("<provider>", "<engine>")} {
		filters := d.Config.FilterSubjects
		if d.Config.FilterSubject != "" {
			filters = []string{d.Config.FilterSubject}
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", code(d.Config.Durable), d.Stream, code(strings.Join(filters, ", ")),
			d.Config.AckWait, limit(int64(d.Config.MaxDeliver)), limit(int64(d.Config.MaxAckPending)))
	}
}

func docCore(b *strings.Builder) {
	b.WriteString("\n## Core subjects\n\nNothing durable depends on these.\n\n")
	fmt.Fprintf(b, "- %s: hints to an executor that something was stored, and questions what it still does for a session.\n", code(Ctl("<executor>")))
	fmt.Fprintf(b, "- %s: a projector started; gateways look for holes.\n", code(CtlProjector))
	fmt.Fprintf(b, "- %s: a gateway asks the executors of an engine for a file of a running sandbox, which comes in chunks on %s; the gateway acknowledges them on %s (adr/0038).\n", code(FilesOn("<provider>", "<engine>")), code(FilesTo("<transfer>")), code(FilesAck("<transfer>")))
	fmt.Fprintf(b, "- %s: a user's inboxes; the answer to a command goes to the subject in header %s.\n", code("_INBOX_<user>.>"), code(HeaderReply))
}

func docUsers(b *strings.Builder) {
	fmt.Fprintf(b, "\n## Accounts\n\nAccount %s owns JetStream; users admin and gate are in it. Each service has an account of its own, which imports what its user "+
		"may publish and nothing else, so that the answer to a request stays in the account that asked ([adr/0042](adr/0042-nats-accounts.md)). "+
		"Requests for consumers, %s, reach JetStream through the gate, on %s.\n", code(AccountLog), code(consumerCreate+">"), code(GatePrefix+"<user>.>"))
	fmt.Fprintf(b, "\n## Users\n\nEach service has a NATS user with these rights and no others; inboxes have the prefix %s. "+
		"Only the janitor may delete messages, and purge two key-value buckets. EVENTS-n stands for each of the %d possible shards.\n", code("_INBOX_<user>"), MaxShards)
	for _, u := range Users() {
		fmt.Fprintf(b, "\n### %s\n\n%s.\n\n- publish: %s\n- subscribe: %s\n", u.Name, u.Doc, shards(u.Publish), shards(u.Subscribe))
	}
}

// shards writes the rights on shard 0 as EVENTS-n and leaves the others' out.
func shards(list []string) string {
	var out []string
	seen := map[string]bool{}
	for _, s := range list {
		skip := false
		for i := 1; i < MaxShards; i++ {
			skip = skip || strings.Contains(s, EventsStream(i))
		}
		s = strings.ReplaceAll(strings.ReplaceAll(s, EventsStream(0), "EVENTS-n"), ReactorDurable(0), "reactor-n")
		if !skip && !seen[s] {
			seen[s] = true
			out = append(out, code(s))
		}
	}
	return strings.Join(out, ", ")
}

func code(s string) string { return "`" + s + "`" }

func age(d time.Duration) string {
	switch {
	case d == 0:
		return "for ever"
	case d%(24*time.Hour) == 0:
		return fmt.Sprintf("%d d", d/(24*time.Hour))
	}
	return d.String()
}

func limit(n int64) string {
	if n <= 0 {
		return "no limit"
	}
	return fmt.Sprint(n)
}
