package topology_test

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/topology"
)

func Example() {
	const session = "ses_01ARYZ6S41TSV4RRFFQ69G5FAV"
	fmt.Println(topology.CommandSubject(topology.ServiceSession, "default", session))
	fmt.Println(topology.EngineJobSubject("docker", "host-1"), topology.EngineJobsDurable("docker", "host-1"))
	fmt.Println(topology.TimerScheduleSubject(session), topology.TimerDueSubject(session))
	// Output:
	// cmd.session.14.default.ses_01ARYZ6S41TSV4RRFFQ69G5FAV
	// job.docker.on.host-1 docker-on-host-1
	// timer.at.ses_01ARYZ6S41TSV4RRFFQ69G5FAV timer.due.ses_01ARYZ6S41TSV4RRFFQ69G5FAV
}
