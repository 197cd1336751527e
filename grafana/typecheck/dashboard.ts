// What the JSON of a dashboard has to be, in Grafana's own types. The test writes each dashboard as a literal of type
// `DashboardJson` beside this file's compiled form, so that a wrong word, a missing field or one too many is an error.
import type {
  Dashboard,
  DashboardLink,
  DataQuery,
  FieldConfig,
  FieldConfigSource,
  Panel,
  RowPanel,
  VariableModel,
} from '@grafana/schema';
import type { Options as BarGaugeOptions } from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type { FieldConfig as HeatmapField, Options as HeatmapOptions } from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type { Options as StatOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type { FieldConfig as StatusField, Options as StatusOptions } from '@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen';
import type { FieldConfig as TableField, Options as TableOptions } from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type { FieldConfig as TimeSeriesField, Options as TimeSeriesOptions } from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has the values of enums, not their members
type Json<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends (infer Item)[]
        ? Json<Item>[]
        : { [Key in keyof T]: Json<T[Key]> };

// the type of Prometheus's queries is in another package, which needs all of Grafana
interface PrometheusQuery extends Omit<DataQuery, 'datasource'> {
  datasource: { type: 'prometheus'; uid: '${datasource}' };
  expr: string;
  legendFormat: string;
  editorMode: 'code';
  format: 'time_series' | 'table' | 'heatmap';
  instant: boolean;
  range: boolean;
}

interface Common extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets' | 'links'> {
  id: number;
  title: string;
  description: string;
  links: DashboardLink[];
  targets: PrometheusQuery[];
}

interface PanelOf<Type extends string, Options, Custom> extends Common {
  type: Type;
  options: Options;
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & { defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom } };
}

// this panel's types are not published
interface AlertList extends Omit<Common, 'targets'> {
  type: 'alertlist';
  options: Record<string, unknown>;
}

type AnyPanel =
  | AlertList
  | PanelOf<'bargauge', Partial<BarGaugeOptions>, never>
  | PanelOf<'heatmap', HeatmapOptions, HeatmapField>
  | PanelOf<'stat', Partial<StatOptions>, never>
  | PanelOf<'status-history', Partial<StatusOptions>, StatusField>
  | PanelOf<'table', Partial<TableOptions>, Partial<TableField>>
  | PanelOf<'timeseries', TimeSeriesOptions, TimeSeriesField>;

interface Row extends Omit<RowPanel, 'panels'> {
  panels: AnyPanel[];
}

export type DashboardJson = Json<
  Omit<Dashboard, 'panels' | 'templating'> & {
    panels: (AnyPanel | Row)[];
    templating: { list: VariableModel[] };
  }
>;
