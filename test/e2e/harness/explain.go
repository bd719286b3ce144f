package harness

import (
	"bytes"
	"fmt"
	"os/exec"
	"runtime/pprof"
	"strings"
	"time"
)

// DescribeStoppedStream returns a description of a session whose stream of events has stopped, for the message of a failed test: the
// events that the stream s received and when, the processes in the session's container, and the goroutines of the
// executors.
func (c *Cluster) DescribeStoppedStream(session string, s *Stream) string {
	var out strings.Builder
	fmt.Fprintf(&out, "now: %s\nshown so far:\n%s\n", time.Now().UTC().Format(time.RFC3339Nano), s.View)
	for _, e := range s.Events {
		fmt.Fprintf(&out, "%4d %s %s %s\n", e.Seq, e.Time.Format(time.RFC3339Nano), e.Type, e.ExecutionID)
	}
	var shown map[string]any
	c.Call(0, "GET", "/api/sessions/"+session, nil, &shown)
	fmt.Fprintf(&out, "session: %v\n", shown)
	if c.opts.Docker {
		// Errors are part of the explanation.
		label := "label=dev.spool.session=" + session
		names, err := exec.Command("docker", "ps", "-aq", "--filter", label).CombinedOutput()
		fmt.Fprintf(&out, "containers: %s %v\n", names, err)
		for name := range strings.FieldsSeq(string(names)) {
			top, err := exec.Command("docker", "top", name, "-o", "pid,stat,etime,time,args").CombinedOutput()
			fmt.Fprintf(&out, "%s %v\n", top, err)
			for _, args := range [][]string{
				{"exec", name, "/spool/bin/runner", "wait-ready", "--within", "1s"}, // the runner's own status
				{"kill", "-s", "QUIT", name}, {"logs", "--tail", "400", name},       // the goroutines of the runner, which ends with this signal
			} {
				said, err := exec.Command("docker", args...).CombinedOutput() //nolint:gosec // fixed words and a container's id
				fmt.Fprintf(&out, "docker %s: %s %v\n", args[0], said, err)
			}
		}
	}
	out.WriteString(executorStacks())
	return out.String()
}

// executorStacks returns the stacks of the goroutines of this process that run executors.
func executorStacks() string {
	var all bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&all, 1); err != nil {
		return fmt.Sprintf("stacks: %v\n", err)
	}
	var out strings.Builder
	for stack := range strings.SplitSeq(all.String(), "\n\n") {
		if strings.Contains(stack, "services/executor") {
			out.WriteString(stack + "\n\n")
		}
	}
	return out.String()
}
