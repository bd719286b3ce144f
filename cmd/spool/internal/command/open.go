package command

import (
	"context"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type openCommand struct{ serverFlags }

// Run prints the URL with which a page signs in.
func (c *openCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.SignIn.CreateSignInCode, &spoolv1.CreateSignInCodeRequest{})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		_, err = terminal.Fprintln(a.Out, signInURL(cl, doc.Value))
		return err
	})
}

// signInURL returns the URL that passes a code to a page of a gateway. Browsers do not send the fragment to servers, so
// the code is in no log of a server or proxy.
func signInURL(cl *client.Client, r *spoolv1.CreateSignInCodeResponse) string {
	return cl.URL() + "/#code=" + r.GetCode()
}
