package egress

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spoolhq/spool/services/executor/internal/egress/admin"
)

// Lines gives the lines of a sandbox's journal that are there after a number,
// without waiting for more. name is the journal that the number is of, "" if none
// was seen yet: of another journal all lines are given. Settled lines are those of all requests to models that end just now too, for which
// it waits 200 ms at most.
func (c *Client) Lines(ctx context.Context, sandbox, name string, after uint64, settled bool) ([]Line, error) {
	q := url.Values{"journal": {name}, "after": {strconv.FormatUint(after, 10)}, "epoch": {strconv.FormatUint(admin.AnyEpoch, 10)}}
	if settled {
		q.Set("settle", "1")
	}
	res, err := c.do(ctx, http.MethodGet, "/v1/sandboxes/"+url.PathEscape(sandbox)+"/journal?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	in := bufio.NewScanner(res.Body)
	in.Buffer(nil, maxLine)
	var out []Line
	for in.Scan() {
		var l struct {
			Line
			End string `json:"end"` // not a journal line: proxies of earlier releases send it after the lines of a released sandbox
		}
		if err := json.Unmarshal(in.Bytes(), &l); err != nil {
			return out, fmt.Errorf("journal of %s: %w", sandbox, err)
		}
		if l.End != "" {
			break
		}
		out = append(out, l.Line)
	}
	if err := in.Err(); err != nil {
		return out, fmt.Errorf("journal of %s: %w", sandbox, err)
	}
	return out, nil
}
