"use strict";

const make = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const find = (id) => document.getElementById(id);
const SHARED = ["Message", "TextPart", "ResponseFormat", "JsonSchema", "StructuredOutputs", "StreamOptions", "SpeculationWish"];
const named = (ref) => ref.split("/").pop();

/** What a field may hold, in words; shapes that are described below are linked. */
const typeOf = (schema, inList = false) => {
  if (schema.$ref) return [make("a", { href: `#${named(schema.$ref)}`, textContent: named(schema.$ref) })];
  const choices = (schema.anyOf || schema.oneOf || []).filter((one) => one.type !== "null");
  if (choices.length) return choices.flatMap((one, i) => (i ? [" or ", ...typeOf(one)] : typeOf(one)));
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") {
    if (schema.maxItems === 0) return ["an empty list"];
    const many = schema.maxItems === undefined ? "" : `at most ${schema.maxItems.toLocaleString("en")} `;
    return [`list of ${many}`, ...(schema.items ? typeOf(schema.items, true) : ["anything"])];
  }
  if (schema.type === "string") {
    if (inList) return ["strings"];
    return schema.maxLength === undefined ? ["string"] : [`string of at most ${schema.maxLength} characters`];
  }
  const kinds = [schema.type].flat().filter((one) => one !== "null");
  const name = { integer: "whole number", object: "object", null: "null" }[kinds[0]] ?? kinds[0] ?? "anything";
  return inList && schema.type ? [`${name}s`] : [name, bounds(schema)];
};
const bounds = ({ minimum, exclusiveMinimum, maximum, exclusiveMaximum }) => {
  if (Math.abs(exclusiveMaximum ?? 0) > Number.MAX_SAFE_INTEGER) return " of 64 bits";
  const least = minimum ?? exclusiveMinimum;
  const most = maximum ?? exclusiveMaximum;
  if (least === undefined) return "";
  const above = exclusiveMinimum === undefined ? `${least}` : `above ${least}`;
  if (most === undefined || most >= 2 ** 31 - 1) return `, ${exclusiveMinimum === undefined ? "at least " : ""}${above}`;
  return `, ${above} to ${most}`;
};

const row = (name, ...what) => make("div", {}, make("dt", {}, make("code", { textContent: name })), make("dd", {}, ...what));
const fields = (schema) => make("dl", {}, ...Object.entries(schema.properties || {}).map(([name, field]) => {
  const type = make("span", { className: "type" }, ...typeOf(field));
  const needed = (schema.required || []).includes(name) ? [make("span", { className: "required", textContent: "required" })] : [];
  return row(name, type, ...needed, ...(field.description ? [make("p", { textContent: field.description })] : []));
}));

const curl = (method, path, example) => {
  const url = `${location.origin}${path}`;
  if (method === "get") return `curl ${url}`;
  return `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(example)}'`;
};

const route = (api, path, method, operation) => {
  const schemas = api.components.schemas;
  const section = make("section", { id: `${method}${path}` },
    make("h2", {}, make("span", { className: "method", textContent: method }), make("code", { textContent: path })),
    make("p", { textContent: `${operation.summary}.` }));
  const body = operation.requestBody?.content["application/json"];
  section.append(make("pre", { tabIndex: 0, textContent: curl(method, path, body?.example) }));
  if (body) {
    const headers = (operation.parameters || []).filter((one) => one.in === "header");
    const shapes = (body.schema.anyOf || [body.schema]).map((one) => fields(schemas[named(one.$ref)]));
    section.append(make("h3", { textContent: "Body" }), ...shapes.flatMap((one, i) => (i ? [make("p", { textContent: "or" }), one] : [one])));
    if (headers.length) section.append(make("h3", { textContent: "Headers" }), make("dl", {}, ...headers.map((one) => row(one.name, one.description))));
  }
  const answer = operation.responses["200"].content["application/json"]?.schema?.$ref;
  if (answer) {
    section.append(make("h3", { textContent: "Answer" }), make("p", {}, ...typeOf({ $ref: answer }),
      ...["Chunk", "Event"].filter((kind) => `${named(answer)}${kind}` in schemas)
        .flatMap((kind) => [", or events with ", ...typeOf({ $ref: `${answer}${kind}` })])));
  }
  const statuses = Object.entries(operation.responses).map(([status, reply]) =>
    row(status, (reply.$ref ? api.components.responses[named(reply.$ref)] : reply).description));
  section.append(make("details", {}, make("summary", { textContent: "Statuses" }), make("dl", { className: "statuses" }, ...statuses)));
  return section;
};

const show = (api) => {
  find("version").textContent = api.info.version;
  find("about").textContent = api.info.description;
  const contents = find("contents");
  const main = find("main");
  const list = (id, text) => contents.append(make("a", { href: `#${id}`, textContent: text }));
  contents.append(make("h2", { textContent: "Routes" }));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      list(`${method}${path}`, path);
      main.append(route(api, path, method, operation));
    }
  }
  contents.append(make("h2", { textContent: "Shapes" }));
  const bodies = ["ChatBody", "CompletionBody"];
  const others = Object.keys(api.components.schemas).filter((name) => !SHARED.includes(name) && !bodies.includes(name));
  for (const name of [...SHARED.filter((one) => one in api.components.schemas), ...others]) {
    list(name, name);
    main.append(make("section", { id: name }, make("h2", {}, make("code", { textContent: name })), fields(api.components.schemas[name])));
  }
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
};

fetch("openapi.json").then((reply) => reply.json()).then(show).catch((error) => {
  find("about").textContent = `The document could not be read: ${error.message}`;
});
