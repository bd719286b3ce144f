package gateway

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/services/gateway/internal/metrics"
)

// Database is the setting with the URL of the Postgres database that has the read models.
type Database struct {
	DatabaseURL string `required:"" env:"SPOOL_DATABASE_URL" help:"URL of the Postgres database that holds the read models."`
}

// DescribeMetrics registers the gateway's metrics without a gateway, to generate documentation from them.
func DescribeMetrics(r prometheus.Registerer) {
	metrics.New(r)
	r.MustRegister(new(storage.Watch).Collectors()...)
}
