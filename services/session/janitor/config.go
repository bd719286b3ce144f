// Package janitor removes data that nothing needs any more: the content of deleted sessions, unreferenced uploads, and
// snapshots beyond the retention.
//
// The janitor belongs to the session service, but has a process and a NATS user of its own, because only this user may
// delete messages. It keeps no state: the log, the buckets and the read models show what is due. So it can be killed
// at any point, and any number of copies may run: an advisory lock in Postgres lets one of them work. Two at once
// would do no harm, because every step is idempotent and every append to the log is guarded.
package janitor

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/settings"
)

// Config holds the janitor's settings. The zero value takes every default, except for DatabaseURL.
type Config struct {
	DatabaseURL string        `name:"database-url" required:"" env:"SPOOL_DATABASE_URL" help:"URL of the Postgres database that holds the read models."`
	Grace       time.Duration `default:"10m" env:"SPOOL_GC_GRACE" help:"Time after which the content of a deleted session is removed, counted from when every reader of the log has passed the deletion."`
	Interval    time.Duration `default:"1m" env:"SPOOL_GC_INTERVAL" help:"Interval at which the janitor looks for data to remove."`
	Uploads     time.Duration `default:"1h" env:"SPOOL_GC_UPLOADS" help:"Age at which unreferenced content is removed: remains of failed uploads, ZIPs of skills without a version, secrets of refused requests. Content with a name stays for at least 15m."`
	Snapshots   int           `default:"500" env:"SPOOL_GC_SNAPSHOTS" help:"Number of newest snapshots of its workspace that a session keeps. The snapshot from which the session resumes is always kept."`
	Sessions    int           `default:"100" env:"SPOOL_GC_SESSIONS" help:"Largest number of deleted sessions whose content one pass removes."`
}

// withDefaults returns the config with its defaults set, or an error that begins with the name of the invalid setting.
func (c Config) withDefaults() (Config, error) {
	settings.SetDefaults(&c)
	for _, d := range []struct {
		name         string
		value, least time.Duration
	}{{"grace", c.Grace, time.Millisecond}, {"interval", c.Interval, 10 * time.Millisecond}, {"uploads", c.Uploads, time.Millisecond}} {
		if d.value < d.least || d.value > 366*24*time.Hour {
			return c, fmt.Errorf("%s: %s is not between %s and 8784h", d.name, d.value, d.least)
		}
	}
	if c.Sessions < 1 || c.Sessions > 10_000 {
		return c, fmt.Errorf("sessions: %d is not between 1 and 10000", c.Sessions)
	}
	if c.Snapshots < 2 || c.Snapshots > 1_000_000 {
		return c, fmt.Errorf("snapshots: %d is not between 2 and 1000000", c.Snapshots)
	}
	if c.DatabaseURL == "" {
		return c, errors.New("database-url is empty: name the Postgres of the read models")
	}
	return c, nil
}

// Deps are the dependencies of the janitor. NATS, Log and Logger are required.
type Deps struct {
	NATS    *nats.Conn
	Log     eventlog.Log
	Logger  *slog.Logger
	Now     func() time.Time // nil for Clock
	Clock   *bus.Clock       // of the streams; nil for one over this host's clock
	Metrics prometheus.Registerer
}

// minObjectAge is the minimum time for which the janitor keeps an object that has a name and to which nothing refers,
// even if Config.Uploads is shorter. By then the command that refers to the object was decided or refused: a snapshot
// takes at most 10 minutes, a push of a skill 5, and commands have shorter deadlines.
const minObjectAge = 15 * time.Minute
