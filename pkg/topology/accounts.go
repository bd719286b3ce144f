package topology

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// AccountLog is the NATS account that owns JetStream. It has the users admin and gate; every service has an account
// of its own.
const AccountLog = "LOG"

// AccountSystem is the system account of NATS, which has no users. It exports HealthSubject.
const AccountSystem = "SYS"

// HealthSubject is the subject of requests for the health of the NATS server and its streams.
const HealthSubject = "$SYS.REQ.SERVER.PING.HEALTHZ"

// Subjects of the consumer gate, which runs in AccountLog.
const (
	// GatePrefix is the prefix of requests to the consumer gate. It is followed by the name of the service's user and
	// the part of the subject after $JS.API.
	GatePrefix = "gate."
	// ReplyPrefix is the prefix of the reply subject of each request from another account.
	ReplyPrefix = "_R_."

	jetStreamAPIPrefix   = "$JS.API."
	consumerCreatePrefix = jetStreamAPIPrefix + "CONSUMER.CREATE."
)

// AccountOf returns the name of the NATS account to which a user belongs.
func AccountOf(user string) string {
	if user == UserAdmin || user == UserGate {
		return AccountLog
	}
	return strings.ToUpper(user)
}

// AccountImport permits the account of a service to send to a subject of another account. NATS rewrites the reply
// subjects of such requests: a response cannot leave the account that sent the request.
type AccountImport struct {
	Account string // the subject in Account
	Subject string // in that account
	To      string // the subject in the service's account
}

// ServiceImports returns the subjects that the account of a service may send to in other accounts: the user's publish
// permissions. The messages that a service publishes to its own replicas stay in its account.
func (u User) ServiceImports() []AccountImport {
	list := []AccountImport{{AccountLog, jetStreamAPIPrefix + "INFO", jetStreamAPIPrefix + "INFO"}} // without it NATS itself answers the JetStream API with an error
	for _, subject := range u.Publish {
		i := AccountImport{subscriberAccount(subject), subject, subject}
		if rest, ok := strings.CutPrefix(subject, jetStreamAPIPrefix); ok && strings.HasPrefix(subject, consumerCreatePrefix) {
			i.Subject = GatePrefix + u.Name + "." + rest
		}
		if i.Account != AccountOf(u.Name) && !slices.Contains(list, i) {
			list = append(list, i)
		}
	}
	return list
}

// subscriberAccount returns the account whose user subscribes to a subject, and from which the others import it.
func subscriberAccount(subject string) string {
	token, rest, _ := strings.Cut(subject, ".")
	if user, ok := strings.CutPrefix(token, InboxPrefix("")); ok {
		return AccountOf(user)
	}
	switch {
	case subject == LiveFilter: // the projector's account exports it as a stream
		return AccountOf(UserProjector)
	case subject == ProjectorStartSubject, token == "files" && strings.HasPrefix(rest, "to."):
		return AccountOf(UserGateway)
	case token == "ctl", token == "files":
		return AccountOf(UserExecutor)
	case subject == HealthSubject:
		return AccountSystem
	}
	return AccountLog
}

// streamImports returns the subjects of other accounts to which the account of a service listens; To is empty. Push
// consumers deliver to inboxes in AccountLog. Announcements come from the account of the projector, and text in flight
// from that of the executor, because NATS does not export a message as a stream if the message reached AccountLog
// through a service import.
func (u User) streamImports() []AccountImport {
	list := []AccountImport{{Account: AccountLog, Subject: inboxFilter(u.Name)}}
	for _, s := range u.Subscribe {
		switch s {
		case LiveFilter:
			list = append(list, AccountImport{Account: AccountOf(UserProjector), Subject: s})
		case FrameFilter:
			list = append(list, AccountImport{Account: AccountOf(UserExecutor), Subject: s})
		}
	}
	return list
}

// logServiceExports are the service exports of AccountLog. They must not overlap. The response threshold of streamed
// responses exceeds the longest wait of a pull request without a message, which is 30 s.
const logServiceExports = `      { service: "ev.>" }
      { service: "dl.>" }
      { service: "cmd.>" }
      { service: "job.>" }
      { service: "timer.>" }
      { service: "dead.>" }
      { service: "head.>" }
      { service: "$KV.>" }
      { service: "$O.>" }
      { service: "$JS.API.INFO" }
      { service: "$JS.API.STREAM.>" }
      { service: "$JS.API.CONSUMER.INFO.>" }
      { service: "$JS.API.CONSUMER.DELETE.>" }
      { service: "$JS.API.DIRECT.GET.*.>" }
      { service: "$JS.FC.>" }
      { service: "$JS.ACK.>" }
      { service: "$JS.API.CONSUMER.MSG.NEXT.>", response_type: stream, response_threshold: "70s" }
      { service: "$JS.API.DIRECT.GET.*", response_type: stream, response_threshold: "10s" }
`

// WriteAccounts writes the accounts and users of an installation in the format of the NATS server's configuration.
// password returns the password of a user as configuration text. maxFile is the disk limit of the streams as
// configuration text: services can read the limit of their account, but not that of the server.
func WriteAccounts(w io.Writer, maxFile string, password func(user string) string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "system_account: %s\naccounts {\n  # Answers requests for the server's health.\n  %[1]s {\n    exports: [\n      { service: %q }\n    ]\n  }\n", AccountSystem, HealthSubject)
	users := Users()
	fmt.Fprintf(&b, "  # Owns JetStream.\n  %s {\n    jetstream: { max_file: %s }\n    users: [\n", AccountLog, maxFile)
	for _, u := range users {
		if AccountOf(u.Name) == AccountLog {
			writeUser(&b, u, password)
		}
	}
	b.WriteString("    ]\n    exports: [\n" + logServiceExports)
	for _, u := range users {
		if account := AccountOf(u.Name); account != AccountLog {
			fmt.Fprintf(&b, "      { service: %q, accounts: [%s] }\n", GatePrefix+u.Name+".>", account)
		}
	}
	writeStreamExports(&b, AccountLog, users)
	fmt.Fprintf(&b, "    ]\n    imports: [\n      { service: { account: %s, subject: %q } }\n    ]\n  }\n", AccountSystem, HealthSubject)
	for _, u := range users {
		if AccountOf(u.Name) != AccountLog {
			writeAccount(&b, u, users, password)
		}
	}
	b.WriteString("}\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// writeAccount writes the account of a service.
func writeAccount(b *strings.Builder, u User, users []User, password func(user string) string) {
	account := AccountOf(u.Name)
	fmt.Fprintf(b, "  %s {\n    users: [\n", account)
	writeUser(b, u, password)
	b.WriteString("    ]\n    exports: [\n")
	for _, subject := range serviceExports(account, users) {
		fmt.Fprintf(b, "      { service: %q }\n", subject)
	}
	writeStreamExports(b, account, users)
	b.WriteString("    ]\n    imports: [\n")
	for _, i := range u.ServiceImports() {
		fmt.Fprintf(b, "      { service: { account: %s, subject: %q }", i.Account, i.Subject)
		if i.To != i.Subject {
			fmt.Fprintf(b, ", to: %q", i.To)
		}
		b.WriteString(" }\n")
	}
	for _, i := range u.streamImports() {
		fmt.Fprintf(b, "      { stream: { account: %s, subject: %q } }\n", i.Account, i.Subject)
	}
	b.WriteString("    ]\n  }\n")
}

// writeStreamExports writes the subjects of an account to which other accounts listen.
func writeStreamExports(b *strings.Builder, account string, users []User) {
	for _, u := range users {
		if AccountOf(u.Name) == AccountLog {
			continue
		}
		for _, i := range u.streamImports() {
			if i.Account == account {
				fmt.Fprintf(b, "      { stream: %q, accounts: [%s] }\n", i.Subject, AccountOf(u.Name))
			}
		}
	}
}

// serviceExports returns the subjects of a service's account to which other accounts send.
func serviceExports(account string, users []User) []string {
	var list []string
	for _, u := range users {
		for _, i := range u.ServiceImports() {
			if AccountOf(u.Name) != AccountLog && i.Account == account && !slices.Contains(list, i.Subject) {
				list = append(list, i.Subject)
			}
		}
	}
	return list
}

// writeUser writes a user with its publish and subscribe permissions. Everything else is denied.
func writeUser(b *strings.Builder, u User, password func(user string) string) {
	fmt.Fprintf(b, "      # %s\n      {\n        user: %s\n        password: %s\n        permissions: {\n", u.Doc, u.Name, password(u.Name))
	for _, p := range []struct {
		verb     string
		subjects []string
	}{{"publish", u.Publish}, {"subscribe", u.Subscribe}} {
		fmt.Fprintf(b, "          %s: { allow: [\n", p.verb)
		for _, s := range p.subjects {
			fmt.Fprintf(b, "            %q\n", s)
		}
		b.WriteString("          ] }\n")
	}
	b.WriteString("        }\n      }\n")
}

// DurableOwner returns the user that owns a durable of a stream, or "" if the stream may not have a durable of that
// name.
func DurableOwner(stream, name string) string {
	switch stream {
	case StreamCommands:
		return map[string]string{SessionCommandsDurable: UserSession, SkillsCommandsDurable: UserSkills}[name]
	case StreamTimers, StreamDead:
		return UserSession
	case StreamJobs:
		return UserExecutor
	}
	for i := range MaxShards {
		if stream == EventsStreamName(i) && name == ReactorDurable(i) {
			return UserSession
		}
	}
	return ""
}
