// The panels of a dashboard, drawn by Grafana's components from its JSON and from answers of a Prometheus. It is not
// Grafana: the heatmap is left out, and the list of alerts is a plain one.
import {
  createTheme,
  dateTime,
  FieldType,
  getDisplayProcessor,
  standardTransformers,
  standardTransformersRegistry,
  ThemeContext,
  toDataFrame,
  transformDataFrame,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, Table, TimeSeries } from '@grafana/ui';
import type { ReactNode } from 'react';
import { createRoot } from 'react-dom/client';

const theme = createTheme({ colors: { mode: 'dark' } });
const WIDTH = 1600;
const CELL = 36;
const GAP = 8;

const { mergeTransformer, convertFieldTypeTransformer, organizeFieldsTransformer } = standardTransformers;
standardTransformersRegistry.setInit(() =>
  [mergeTransformer, convertFieldTypeTransformer, organizeFieldsTransformer].map((transformer: any) => ({
    id: transformer.id,
    name: transformer.name,
    transformation: async () => transformer,
    editor: () => null,
  })) as any
);

/** The answers of one query as frames: a table of labels and values, or a frame a series. */
function framesOf(target: any, answer: any[]): any[] {
  if (target.format === 'table') {
    const labels = Object.keys(answer[0]?.metric ?? {});
    const texts = labels.map((name) => ({ name, type: FieldType.string, values: answer.map((row) => row.metric[name]) }));
    const values = answer.map((row) => Number(row.value[1]));
    return [toDataFrame({ fields: [...texts, { name: `Value #${target.refId}`, type: FieldType.number, values }] })];
  }
  return answer.map((series) => {
    const points = series.values ?? [series.value];
    const name = target.legendFormat.replace(/{{(\w+)}}/g, (_: string, label: string) => series.metric[label] ?? '');
    const time = { name: 'Time', type: FieldType.time, values: points.map((point: any) => point[0] * 1000) };
    const values = points.map((point: any) => Number(point[1]));
    const value = { name: 'Value', type: FieldType.number, values, config: { displayNameFromDS: name } };
    return toDataFrame({ name, fields: [time, value] });
  });
}

/** A field with the unit, the colours and the columns' own looks of its panel. */
function dressed(panel: any, field: any, index: number): any {
  const mode = panel.type === 'timeseries' ? 'palette-classic' : 'thresholds';
  const config = { color: { mode }, ...panel.fieldConfig.defaults, ...field.config };
  for (const override of panel.fieldConfig.overrides) {
    if (override.matcher.options === (field.config.displayName ?? field.name)) {
      for (const { id, value } of override.properties) {
        if (id === 'custom.cellOptions') config.custom = { ...config.custom, cellOptions: value };
        else config[id] = value;
      }
    }
  }
  const steps = config.thresholds.steps.map((step: any) => ({ ...step, value: step.value ?? -Infinity }));
  const made = { ...field, config: { ...config, thresholds: { ...config.thresholds, steps } }, state: { seriesIndex: index } };
  return { ...made, display: getDisplayProcessor({ field: made, theme }) };
}

async function dataOf(panel: any, answers: any): Promise<any[]> {
  let frames = panel.targets.flatMap((target: any) => framesOf(target, answers[`${panel.title} ${target.refId}`]));
  if (panel.type === 'table') {
    frames = await new Promise((done) => transformDataFrame(panel.transformations, frames).subscribe(done as any));
  }
  return frames.map((frame: any, index: number) => ({
    ...frame,
    fields: frame.fields.map((field: any) => dressed(panel, field, index)),
  }));
}

function Alerts({ alerts }: { alerts: any[] }): ReactNode {
  const color: Record<string, string> = { firing: '#f2495c', pending: '#ff9830' };
  return (
    <div style={{ font: '13px Inter, sans-serif', color: '#ccccdc' }}>
      {alerts.map(({ metric }) => (
        <div key={JSON.stringify(metric)} style={{ padding: '5px 2px' }}>
          <span style={{ color: color[metric.alertstate], display: 'inline-block', width: 66 }}>{metric.alertstate}</span>
          {metric.alertname} {metric.layer && `${metric.block}.${metric.layer}`}
        </div>
      ))}
    </div>
  );
}

function Body({ panel, data, width, height, range }: any): ReactNode {
  const [frame] = data;
  if (panel.type === 'table') {
    return <Table data={frame} width={width} height={height} columnMinWidth={90} initialSortBy={panel.options.sortBy} />;
  }
  if (panel.type === 'stat') {
    const field = frame.fields[1];
    const title = panel.options.textMode === 'value_and_name' ? frame.name : undefined;
    const value = { ...field.display(field.values[field.values.length - 1]), title };
    const { colorMode, textMode } = panel.options;
    return <BigValue {...{ theme, width, height, value, colorMode, textMode }} graphMode={'none' as any} />;
  }
  const legend = { ...panel.options.legend, width: Math.min(260, width * 0.38) };
  return <TimeSeries frames={data} timeZone="utc" timeRange={range} {...{ width, height, legend }} />;
}

async function main(): Promise<void> {
  const [dashboard, answers] = await Promise.all(
    ['dashboard.json', 'answers.json'].map((name) => fetch(name).then((response) => response.json()))
  );
  const [from, to] = answers.range.map((seconds: number) => dateTime(seconds * 1000));
  const range = { from, to, raw: { from, to } };
  const panels = dashboard.panels.filter((panel: any) => !['row', 'heatmap'].includes(panel.type));
  const drawn = await Promise.all(
    panels.map(async (panel: any) => [panel, panel.targets ? await dataOf(panel, answers) : []] as const)
  );
  const column = (WIDTH + GAP) / 24;
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      {drawn.map(([panel, data]) => {
        const { x, y, w, h } = panel.gridPos;
        const [width, height] = [w * column - GAP, h * CELL - GAP];
        return (
          <div key={panel.id} style={{ position: 'absolute', left: x * column, top: y * CELL, width, height }}>
            <PanelChrome title={panel.title} width={width} height={height} padding="md">
              {(innerWidth, innerHeight) =>
                panel.type === 'alertlist' ? (
                  <Alerts alerts={answers.alerts} />
                ) : (
                  <Body {...{ panel, data, range }} width={innerWidth} height={innerHeight} />
                )
              }
            </PanelChrome>
          </div>
        );
      })}
    </ThemeContext.Provider>
  );
}

main();
