"""Rows of tables and of files of rows, by DuckDB: conditions, order, summary, provenance.

DuckDB streams what it reads: memory grows with what is shown, not with the file. Nothing is fetched
from a network.
"""

import glob
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from stages.base.errors import InputError
from stages.base.tables import read_provenance
from stages.rows.readers import read_rows

# Text stays text: no dates are made of it. What is nested in a cell of JSON stays as it is written.
JSON = "maximum_depth=2, map_inference_threshold=-1, dateformat='no', timestampformat='no'"
NUMBERS = "auto_type_candidates=['BIGINT', 'DOUBLE', 'VARCHAR'], max_line_size=67108864"
READERS = {
    ".parquet": "read_parquet($files, union_by_name=true{more})",
    ".jsonl": f"read_json($files, format='newline_delimited', {JSON}{{sample}}{{more}})",
    ".json": f"read_json($files, union_by_name=true, {JSON}{{sample}}{{more}})",
    ".csv": f"read_csv($files, delim=',', quote='\"', header=true, {NUMBERS}{{sample}}{{more}})",
}
LARGE = 1 << 28  # bytes; of a larger file the first rows alone tell the types of its columns
FRACTIONS = ("FLOAT", "DOUBLE")
WORD = re.compile(
    r"'(?:[^']|'')*'|\"[^\"]*\"|(==|=|!=|<>|[<>]=?)\s*null\b|~|\b[a-z_]\w*\b",
    re.IGNORECASE,
)


class Rows:
    """Rows of one file, or of several as one; `where` narrows what the methods below see.

    Rows are dicts; those of several files begin with `file`, the name of the one that each is from.
    `kind` is a key of READERS, or "dataset" for a folder of `save_to_disk`.
    """

    def __init__(self, path: Path, files: list[Path], kind: str):
        self.path, self.files, self.kind = path, files, kind
        self.condition = ""

    @cached_property
    def relation(self) -> duckdb.DuckDBPyRelation:
        """The rows that fit, as a query that was not run yet."""
        database = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        with self._readable():
            if self.kind == "dataset":
                import datasets  # takes a second, which other files need not spend

                table = datasets.load_from_disk(str(self.path)).with_format("arrow")[:]
                return database.from_arrow(table)
            many = len(self.files) > 1
            whole = sum(file.stat().st_size for file in self.files) <= LARGE
            reader = READERS[self.kind].format(
                sample=", sample_size=-1" if whole else "", more=", filename=true" * many
            )
            head = "select parse_filename(filename, true) as file, * exclude filename" * many
            files = [glob.escape(str(file)) for file in self.files]
            return database.sql(f"{head} from {reader}", params={"files": files})

    @property
    def names(self) -> list[str]:
        return self.relation.columns

    def where(self, condition: str) -> None:
        """Keep rows that fit an SQL condition as well; InputError says what is wrong with it."""
        try:
            self.relation = self.relation.filter(spelled(condition, self.names))
        except duckdb.Error as error:
            raise InputError(f"condition {condition!r}: {self._said(error)}") from error
        self.condition = condition

    def check(self, name: str) -> None:
        """InputError for a column that is not there names those that are."""
        if name not in self.names:
            raise InputError(f"{self.path}: no column {name!r}; there are {', '.join(self.names)}")

    def count(self) -> int:
        """Rows that fit."""
        return self._fetched(self.relation.aggregate("count(*) as n"))[0]["n"]

    def first(self, count: int, columns: list[str] | None = None) -> list[dict]:
        """The first rows that fit."""
        return self._fetched(self._shown(self.relation.limit(count), columns))

    def extreme(
        self, count: int, key: str, descending: bool, columns: list[str] | None = None
    ) -> list[dict]:
        """The rows with the lowest (or highest) `key`; nulls and NaN come last, ties in order."""
        self.check(key)
        column, kind = quoted(key), self._kinds()[key]
        missing = f"{column} is null" + f" or isnan({column})" * (kind in FRACTIONS)
        numbered = self.relation.select("*, row_number() over () as __row")
        order = f"{missing}, {column} {'desc' if descending else 'asc'}, __row"
        return self._fetched(self._shown(numbered.order(order).limit(count), columns))

    def summary(self) -> list[dict]:
        """One entry a column: nulls; mean, lowest, highest of numbers, or of the items of lists.

        `items` is the mean length of a list.
        """
        kinds = self._kinds()
        figures = ", ".join(_figures(name, kind) for name, kind in kinds.items())
        found = self._fetched(self.relation.aggregate(figures))[0]
        return [{"column": name, "type": kinds[name]} | found[name] for name in kinds]

    def provenance(self) -> dict[str, dict]:
        """File name -> what made it, as `write_table` noted; rows too. Of Parquet files alone."""
        if self.kind != ".parquet":
            return {}
        with self._readable():
            return {
                file.name: {"rows": pq.read_metadata(file).num_rows, **read_provenance(file)}
                for file in self.files
            }

    def _kinds(self) -> dict[str, str]:
        return dict(zip(self.names, map(str, self.relation.types), strict=True))

    def _shown(self, relation, columns: list[str] | None):
        """Some of the columns, `file` always; nested cells of JSON as the JSON that they were."""
        kinds = self._kinds()
        names = dict.fromkeys(["file"] * (len(self.files) > 1) + (columns or self.names))
        json_ = self.kind in (".json", ".jsonl")
        cells = {n: f"to_json({quoted(n)})" for n in names if json_ and kinds[n][-1] in ")]"}
        return relation.select(
            ", ".join(f"{cells.get(n, quoted(n))} as {quoted(n)}" for n in names)
        )

    def _fetched(self, relation) -> list[dict]:
        with self._readable():
            names, kinds, rows = relation.columns, relation.types, relation.fetchall()
        parsed = {name for name, kind in zip(names, kinds, strict=True) if kind == "JSON"}
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [
            {n: json.loads(x) if n in parsed and x is not None else x for n, x in row.items()}
            for row in found
        ]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """What DuckDB may raise -> InputError; of a broken file of text it names the line."""
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError, ValueError) as error:
            if self.condition and isinstance(error, duckdb.ConversionException):
                raise InputError(f"condition {self.condition!r}: {self._said(error)}") from error
            if self.kind in (".jsonl", ".csv"):
                no = dict.fromkeys(("split", "name", "revision", "max_samples"))
                for file in self.files:
                    for _ in read_rows(str(file), seed=0, **no):
                        pass
            found = f"{self.path}: cannot be read as rows ({self._said(error)})"
            raise InputError(found) from error

    def _said(self, error: Exception) -> str:
        """The first line of an error, without its class; columns where one is not there."""
        line = (str(error).splitlines() or [type(error).__name__])[0]
        line = re.sub(r"^[A-Z]\w+(?: \w+)* Error: ", "", line)
        absent = re.match(r'Referenced column "(.*)" not found', line)
        return f"no column {absent[1]!r}; there are {', '.join(self.names)}" if absent else line


def quoted(name: str) -> str:
    """A column's name in SQL; `group` is a word of the language otherwise."""
    return '"' + name.replace('"', '""') + '"'


def spelled(condition: str, names: list[str]) -> str:
    """A condition as DuckDB reads it: `group == 1 and answer != "" or kl == null`.

    Columns are quoted, "text" that is no column becomes 'text', `== null` becomes `is null`.
    """

    def word(match: re.Match) -> str:
        found, sign = match[0], match[1]
        if sign in ("==", "="):
            return "is null"
        if sign in ("!=", "<>"):
            return "is not null"
        if sign or found == "~":
            use = "`is null` or `is not null`" if sign else "`contains(column, 'text')`"
            raise InputError(f"condition {condition!r}: found {found!r}; expected {use}")
        if found[0] == '"' and found[1:-1] not in names:
            return "'" + found[1:-1].replace("'", "''") + "'"
        return quoted(found) if found in names else found

    return WORD.sub(word, condition)


def _figures(name: str, kind: str) -> str:
    """SQL of a struct with the figures of one column."""
    column, item = quoted(name), kind.removesuffix("[]")
    figures = dict.fromkeys(("nulls", "mean", "lowest", "highest", "items"), "null")
    figures["nulls"] = "count(*) - count({})"
    if re.fullmatch(r"U?\w*INT(EGER)?|FLOAT|DOUBLE|BOOLEAN|DECIMAL.*", item):
        low, high = ("{}", "{}") if item == kind else ("list_min({})", "list_max({})")
        figures["lowest"], figures["highest"] = f"min({low})", f"max({high})"
        mean = ("mean", "avg({}::double)") if item == kind else ("items", "avg(len({}))")
        figures |= [mean]
    figures = {key: sql.format(column) for key, sql in figures.items()}
    return "{" + ", ".join(f"{key}: {sql}" for key, sql in figures.items()) + f"}} as {column}"
