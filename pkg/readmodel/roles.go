package readmodel

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// The Postgres roles of the services. Neither is a superuser. A database with a single role for all services works
// without them.
const (
	// ProjectorRole is the Postgres role that owns the schemas of the read models. The projector, the janitor, `spool
	// rebuild` and `spool gc` connect with it.
	ProjectorRole = "spool_projector"
	// GatewayRole is the Postgres role of gateways. It can read the tables that gateways need and cannot write. It cannot
	// read the hashes of API keys; the function accepted_key looks one up.
	GatewayRole = "spool_gateway"
)

// gatewayTables are the tables of which gateways may read every column. Of the table keys they may read only
// gatewayKeyColumns.
var gatewayTables = []string{
	TableCheckpoints, TableSessions, TableDeletedSessions, TableExecutions, TableBlocks, TableEvents, TableToolCalls, TableConversations, TableApprovals, TableSandboxes, TableFiles, TableUsage,
	TableCatalogueEntries, TableCatalogueVersions, TableTenantUsage, TableTenantBudgets, TableTenantLimits, TableAudit, TableSessionStates, versionTable,
}

// gatewayKeyColumns are the columns of the table keys that the gateways' database role may read.
var gatewayKeyColumns = []string{"tenant", "id", "name", "prefix", "created_at", "revoked_at", "role", "agents", "expires_at", "created_by"}

// gatewayFunctions are the SQL functions that gateways may call.
var gatewayFunctions = []string{"accepted_key(text)", "key_refusal(text, text)"}

// ErrNotSuperuser is returned by CreateRoles if the URL's role is not a Postgres superuser.
var ErrNotSuperuser = errors.New("the role is not a superuser")

// Passwords are the passwords of the roles of the projector and of gateways; "" means no password, for a server that
// trusts its socket.
type Passwords struct{ Projector, Gateway string }

// CreateRoles creates or updates ProjectorRole and GatewayRole, and makes ProjectorRole the owner of existing read
// models. The URL must be that of a superuser, for the database of the read models. CreateRoles is idempotent, and
// several callers may run it at the same time.
//
// CreateRoles revokes rights of PUBLIC that no service needs and with which GatewayRole could write or block others:
// access to the databases postgres and template1, temporary tables, large objects, advisory locks. The server should
// therefore be used by Spool only.
func CreateRoles(ctx context.Context, url string, p Passwords) (err error) {
	conn, err := Connect(ctx, url, Schema)
	if err != nil {
		return fmt.Errorf("create the roles: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	var name string
	var super bool
	if err := conn.QueryRow(ctx, "SELECT rolname, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user").Scan(&name, &super); err != nil {
		return fmt.Errorf("create the roles: %w", err)
	}
	if !super {
		return fmt.Errorf("create the roles as %s: %w", name, ErrNotSuperuser)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		// Roles belong to all databases of the server, and advisory locks to one database. This lock excludes other
		// callers in all databases.
		if _, err := tx.Exec(ctx, "LOCK TABLE pg_catalog.pg_authid IN SHARE ROW EXCLUSIVE MODE"); err != nil {
			return err
		}
		if err := createRole(ctx, tx, ProjectorRole, p.Projector); err != nil {
			return err
		}
		if err := createRole(ctx, tx, GatewayRole, p.Gateway); err != nil {
			return err
		}
		for _, sql := range []string{revokePublicSQL, grantProjectorSQL, transferOwnershipSQL} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("create the roles: %w", err)
	}
	return nil
}

// createRole creates a role that may log in and has no other rights.
func createRole(ctx context.Context, tx pgx.Tx, name, password string) error {
	var exists bool
	if err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = $1)", name).Scan(&exists); err != nil {
		return err
	}
	if !exists {
		if _, err := tx.Exec(ctx, "CREATE ROLE "+name); err != nil {
			return err
		}
	}
	// The statement has no parameters, so Postgres must quote the password. NULL means none.
	var alter string
	err := tx.QueryRow(ctx, `SELECT format('ALTER ROLE %I LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD %L', $1::text, nullif($2::text, ''))`,
		name, password).Scan(&alter)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, alter)
	return err
}

// revokePublicSQL revokes the rights of PUBLIC that no service needs.
const revokePublicSQL = `DO $$
DECLARE statement text;
BEGIN
	FOR statement IN
		SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', datname) FROM pg_catalog.pg_database
		 WHERE datname IN (current_database(), 'postgres', 'template1')
		UNION ALL
		SELECT 'REVOKE CREATE ON SCHEMA public FROM PUBLIC' FROM pg_catalog.pg_namespace WHERE nspname = 'public'
		UNION ALL
		SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', oid::regprocedure) FROM pg_catalog.pg_proc
		 WHERE pronamespace = 'pg_catalog'::regnamespace
		   AND (proname LIKE 'pg\_%advisory\_%' OR proname = ANY ('{lo_creat,lo_create,lo_from_bytea,lo_put,lo_truncate,lo_truncate64,lo_unlink,lowrite,pg_logical_emit_message}'))
	LOOP
		EXECUTE statement;
	END LOOP;
END $$`

// grantProjectorSQL allows both roles to connect, and ProjectorRole to create schemas and take advisory locks.
const grantProjectorSQL = `DO $$
DECLARE statement text;
BEGIN
	FOR statement IN
		SELECT format('GRANT CONNECT ON DATABASE %I TO ` + GatewayRole + `, ` + ProjectorRole + `', current_database())
		UNION ALL
		SELECT format('GRANT CREATE ON DATABASE %I TO ` + ProjectorRole + `', current_database())
		UNION ALL
		SELECT format('GRANT EXECUTE ON FUNCTION %s TO ` + ProjectorRole + `', oid::regprocedure) FROM pg_catalog.pg_proc
		 WHERE pronamespace = 'pg_catalog'::regnamespace AND proname LIKE 'pg\_%advisory\_%'
	LOOP
		EXECUTE statement;
	END LOOP;
END $$`

// transferOwnershipSQL makes ProjectorRole the owner of read models that another role created. Sequences and types
// follow their tables.
const transferOwnershipSQL = `DO $$
DECLARE statement text;
BEGIN
	FOR statement IN
		WITH n AS (SELECT oid, nspname, nspowner FROM pg_catalog.pg_namespace WHERE nspname IN ('` + Schema + `', '` + ShadowSchema + `', '` + RetiredSchema + `'))
		SELECT format('ALTER SCHEMA %I OWNER TO ` + ProjectorRole + `', nspname) FROM n WHERE nspowner <> '` + ProjectorRole + `'::regrole
		UNION ALL
		SELECT format('ALTER TABLE %s OWNER TO ` + ProjectorRole + `', c.oid::regclass) FROM pg_catalog.pg_class c JOIN n ON n.oid = c.relnamespace
		 WHERE c.relkind IN ('r', 'p', 'v', 'm') AND c.relowner <> '` + ProjectorRole + `'::regrole
		UNION ALL
		SELECT format('ALTER ROUTINE %s OWNER TO ` + ProjectorRole + `', p.oid::regprocedure) FROM pg_catalog.pg_proc p JOIN n ON n.oid = p.pronamespace
		 WHERE p.proowner <> '` + ProjectorRole + `'::regrole
	LOOP
		EXECUTE statement;
	END LOOP;
END $$`

// grantGatewayRead grants GatewayRole read access to a schema, if the server has the role. It does nothing if the role
// has that access already, because a grant would conflict with a rebuild that renames the schema.
func grantGatewayRead(ctx context.Context, conn *pgx.Conn, schema string) error {
	var exists, granted bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = $1)", GatewayRole).Scan(&exists); err != nil || !exists {
		return err
	}
	err := conn.QueryRow(ctx, `SELECT has_schema_privilege($1, $2::text, 'USAGE')
			AND (SELECT bool_and(has_function_privilege($1, format('%I.', $2::text) || f, 'EXECUTE')) FROM unnest($6::text[]) AS f)
			AND (SELECT bool_and(has_table_privilege($1, format('%I.%I', $2::text, t), 'SELECT')) FROM unnest($3::text[]) AS t)
			AND (SELECT bool_and(has_column_privilege($1, format('%I.%I', $2::text, $4::text), c, 'SELECT')) FROM unnest($5::text[]) AS c)`,
		GatewayRole, schema, gatewayTables, TableKeys, gatewayKeyColumns, gatewayFunctions).Scan(&granted)
	if err != nil || granted {
		return err
	}
	in := pgx.Identifier{schema}.Sanitize()
	var b pgx.Batch
	b.Queue("GRANT USAGE ON SCHEMA " + in + " TO " + GatewayRole)
	for _, t := range gatewayTables {
		b.Queue("GRANT SELECT ON " + in + "." + t + " TO " + GatewayRole)
	}
	for _, c := range gatewayKeyColumns {
		b.Queue("GRANT SELECT (" + c + ") ON " + in + "." + TableKeys + " TO " + GatewayRole)
	}
	for _, f := range gatewayFunctions {
		b.Queue("GRANT EXECUTE ON FUNCTION " + in + "." + f + " TO " + GatewayRole)
	}
	return conn.SendBatch(ctx, &b).Close()
}
