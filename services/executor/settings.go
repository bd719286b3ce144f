package executor

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress/telemetry"
	"github.com/spoolhq/spool/services/executor/internal/worker"
)

// EgressSettings are the settings of the egress proxy's program.
type EgressSettings = egress.Settings

// DescribeMetrics registers the metrics of an executor without values, so that the documentation can list
// them.
func DescribeMetrics(r prometheus.Registerer) {
	worker.New(worker.Config{Slots: 1, Pool: map[string]int{"claude-code": 1}}, worker.Deps{Metrics: r})
	registerDiskLimit(r, func() string { return "" })
}

// DescribeEgressMetrics registers the metrics of an egress proxy without values, so that the documentation
// can list them.
func DescribeEgressMetrics(r prometheus.Registerer) {
	telemetry.New(func() int { return 0 }, r)
}
